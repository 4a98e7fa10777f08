"""How the ranks that write to one run find each other, and how they end.

In the room: whether a rank leads on its node (`role`), the connection between a node's leader and its followers
(`server`, `client`, and `sockets` for both), and how the rank that ends the run waits for the others (`barrier`).
May enter: what the ranks of one run send each other. Must not: what one vendor's client needs for it.

The messages on a node's socket. Each is one line of JSON, an object with these keys:

```
follower to leader                  leader to follower
rank: 1           "I am here"       publish: {...}, server: "..."   the value to use, and which server sent it
request: "..."    "publish again"   reject: "why"                   there is no value, and there will be none
suspended: true   "I have stopped"  suspend: true                   stop using the value until the next `publish`
```

The end of a connection is a message too: a follower that hangs up is done, a leader that hangs up has gone. The kernel
hangs up for a process that is killed. `flyteplugins_tracking.trackers.wandb.shared` draws the order of the messages.
"""
