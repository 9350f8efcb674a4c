"""sim: a seeded world in which the rooms are tested under faults.

    `./dev sim --seeds 2000`                     all rooms, one line of progress
    `./dev sim --room topics --seed 17 --trace`  replay one seed, event by event

The room owns the event loop with virtual time and a shuffled ready queue; the fault model of objects, of consensus and
of the network between actors; crash and restart; and the oracles. It owns no rule of another room: an oracle states
what must hold, in terms of the room's public interface.

Fault model. A call to a store may be delayed. It may take effect or not, and the caller learns of that or not: ok,
UnavailableError (no effect), UnknownOutcomeError after the effect, UnknownOutcomeError without it. A put, append,
compare-and-set or delete that took effect may be delivered again later; a put that was reported as UnknownOutcomeError
may arrive later for the first time. A process may stall, its wall clock may be off, and it may die at any of its steps;
then its memory is lost and its stores remain. Messages between client and node may be delayed, or lost with their
connection. Not modelled: reordering inside one connection, corruption, and stores that break their own contract.

Invariant (determinism): one seed decides everything. The same seed gives the same trace, byte for byte, in any process.

Invariant (virtual time): nothing waits for real time. A world in which nothing can happen any more is a Deadlock.

Invariant (death is final): a dead actor never takes another step, not even a `finally`.
"""
