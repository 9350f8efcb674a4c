"""groups: consumer groups. The cores of the two protocols decide, `led` writes and answers, `coordinator` knows which
groups are here.

    state           the classic protocol: one group in memory, and what a client asks
    classic, phases what its members may ask; how a rebalance begins, completes and ends. Pure: time and ids come in,
                    answers go to an outbox
    consumer_state  the consumer protocol (KIP-848): the same
    consumer, reconciling, assignors    what its members may ask; how each gets to what it should have; who should have
                    what. Pure
    mixed           what members of the classic protocol may ask in a group of the consumer protocol. Pure
    migrating       how a group goes from one protocol to the other while members are in it. Pure
    either          a group of either protocol, which goes over when that is due. Pure
    patterns        subscriptions by regular expression, and the topics that a node sees
    stored, rows    from a group to its rows in the metastore and back; taking a group over
    led             one group that this node coordinates, of either protocol: its writes in order, its timer
    coordinator     all of them, and what handlers call

CG1  A group's rows are written only with the seqno of its head row, which every take-over changes: a coordinator that
     was replaced writes nothing more, neither an assignment nor an offset.
CG2  An assignment reaches its members after it is durable, so it survives its coordinator and nobody else can hand out
     another one of the same generation.
CG3  Writes of one group are appended one after the other, in the order in which they were asked for.
CG4  After a write of unknown outcome nothing is written before the head row was changed: what may still be on its way
     is fenced by then.
CG5  A group is of the consumer protocol while anybody in it speaks that, else of the classic one; while nobody is in
     it, whoever comes next decides. What it has committed stays, and its generations and epochs go on.
"""
