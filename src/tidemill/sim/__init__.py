"""sim: the seeded world in which the rooms are tried under faults.

    python -m tidemill.sim --seeds 2000                     all rooms, one line of progress
    python -m tidemill.sim --room topics --seed 17 --trace  replay one seed, event by event

Owns: the event loop with virtual time and a shuffled ready queue, the fault model of objects,
consensus and the network between actors, crash and restart, and the oracles.
Does not own any rule of another room: oracles say what must hold, in the terms of the fronts.

Fault model. A call to a store may be delayed, and takes effect or not, told or not: ok, Unavailable
(no effect), Unknown after the effect, Unknown without it. A put, append, compare-and-set or delete that
took effect may be delivered again later; a put told Unknown may arrive only later. A process may stall,
its wall clock may be off, and it may die at any of its steps; what it had in memory is gone, its stores
stay. Messages between client and node may be delayed or lost with their connection. Not modelled:
reordering inside one connection, corruption, and stores that break their own contract.

W1  One seed decides everything: the same seed gives the same trace, byte for byte, in any process.
W2  Nothing waits for real time; a world in which nothing can happen any more is a Deadlock.
W3  A dead actor never takes another step, not even a `finally`.
"""
