"""The messages that the nodes of a job send to one another, and how they are encoded, signed and stored.

The messages (messages.py) go through the store of the round, always to or from the leader (store_channel.py):

    every node --- NodeInfo, AttemptFailing, RanksStopped, AttemptReport, NodeLeaving, ShutdownAck ---> the leader
    the leader --- StartAttempt, StopAttempt, AttemptDecision, JobFinished ---------------------------> all nodes
    the leader --- RankAssignment --------------------------------------------------------------------> one node
    every node --- heartbeat: a counter, which is neither encoded nor signed -------------------------> the leader

A message becomes an entry of the store in two steps, and is read in the opposite order:

    message  -- json_codec.py: by its fields and their types -->  JSON data  -- signed_json.py -->  entry

- Signature: it is an HMAC-SHA256 over the JSON, the job and the name of the entry. Its key is the secret of the job, which
  is `Rendezvous(secret=...)` or the environment variable MPWATCH_SECRET. If a job has no secret, nothing is signed. Then
  every program that can reach the store can write valid entries.
- Size limits: an entry may have 256 KiB, and a broadcast of the leader 1 MiB. A text may have 65,536 characters, and the
  JSON of one failure 64 KiB. A larger failure is shortened before it is sent.
- Checks: the reader first checks the size and the signature, and then whether each field has the right type. It refuses
  control characters, since a text may be shown on a terminal. It ignores and logs an invalid entry.
- Pickles: nodes exchange no pickles, with one exception. torch's rendezvous state contains a pickle, which mpwatch reads
  with a restricted unpickler (rendezvous/torch_state.py).

node_machine.py and leader.py decide which messages are sent.
"""
