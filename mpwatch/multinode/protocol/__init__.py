"""What the nodes of a job send to one another, and how it is encoded, signed and stored.

The messages (messages.py) go through the store of the round, and always to or from the leader (store_channel.py):

    every node --- NodeInfo, AttemptFailing, RanksStopped, AttemptReport, NodeLeaving, ShutdownAck ---> the leader
    the leader --- StartAttempt, StopAttempt, AttemptDecision, JobFinished ---------------------------> all nodes
    the leader --- RankAssignment --------------------------------------------------------------------> one node
    every node --- heartbeat: a counter, which is neither encoded nor signed -------------------------> the leader

A message becomes an entry of the store in two steps, and is read in the opposite order:

    message  -- json_codec.py: by its fields and their types -->  JSON data  -- signed_json.py -->  entry

- Signature: an HMAC-SHA256 over the JSON, the job and the name of the entry. The key is the job's secret: that of
  `Rendezvous(secret=...)`, or else the environment variable MPWATCH_SECRET. A job without a secret signs nothing. Then every
  program that can reach the store can write valid entries.
- Size limits: 256 KiB for an entry, and 1 MiB for a broadcast of the leader. A text may have 65,536 characters, and the JSON
  of one failure 64 KiB. A larger failure is shortened before it is sent.
- Checks: first the size and the signature, then each field against its type. Control characters are refused, since a text
  may end up on a terminal. An invalid entry is ignored and logged.
- Pickles: nodes exchange none. The one exception is torch's own rendezvous state, which mpwatch reads with a restricted
  unpickler (rendezvous/torch_state.py).

node_machine.py and leader.py decide what is sent.
"""
