"""W&B runs that several ranks share: one process of each node, the leader, writes, and its followers attach to it.

The leader has called `wandb.init`, and so has a wandb-core. Its followers call `wandb.attach` and log into the same
stream. Who is who, and the messages: `trackers.node_group`.

```
leader (primary or local rank 0)       socket                 followers (the other ranks of the node)
NodeServer(name)                                              NodeClient.connect(name)
  |                                                             |  waits until the socket is there
  |<------------------- rank: 1 --------------------------------|
wandb.init                                                      |
  |-------------------- publish: run id, wandb-core ----------->|  wandb.attach; a second `request` and another
  |   (or reject: why) ---------------------------------------->|  connection, if that fails
  |                                                             |  run.log ... straight into the leader's wandb-core
  |                                                             |
  |== SIGTERM: the run ends early ==============================|
  |-------------------- suspend ------------------------------->|  holds its rows from now on
  |<------------------- suspended ------------------------------|  wandb-core has read its rows
run.finish(143)                                                 |
  |<------------------- request: "" ----------------------------|  its function logs on, in `finally`
opens the run again                                             |
  |-------------------- publish: run id, new wandb-core ------->|  attaches again, and logs the rows that it held
  |                                                             |
  |== wandb-core dies ==========================================|
  |<------------------- request: the dead wandb-core -----------|  holds its rows
starts another, opens the run again                             |
  |-------------------- publish: run id, new wandb-core ------->|  attaches again
  |                                                             |
  |== the end ==================================================|
waits for its followers                                         |
  |<------------------- hangs up -------------------------------|  its function has returned, or it was killed
run.finish(0)
```

If the leader is killed, its followers are disconnected. Their functions continue, and their rows are lost, with one
warning. A run with leaders on several nodes is in W&B's own shared mode on all of them: another kind of writer beside
these would lose rows (https://github.com/wandb/wandb/issues/12269). The primary waits for the other leaders through
`trackers.barrier`.

In the room: the choice between opening the run and attaching to it (`open`), the leader's handle (`leader`), the
follower's (`follower`), and their common parts (`common`). May enter: code for runs with several ranks. Must not: code
for runs of one process, and private names of wandb.
"""
