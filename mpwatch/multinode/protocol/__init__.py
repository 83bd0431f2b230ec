"""The messages that the nodes of a job send to one another, and how they are encoded, signed and stored.

The messages (messages.py) go through the store of the round, always to or from the leader (store_channel.py):

    every node --- NodeInfo, AttemptFailing, RanksStopped, AttemptReport, NodeLeaving, ShutdownAck ---> the leader
    the leader --- StartAttempt, StopAttempt, AttemptDecision, JobFinished ---------------------------> all nodes
    the leader --- RankAssignment --------------------------------------------------------------------> one node
    every node --- heartbeat: a counter, which is neither encoded nor signed -------------------------> the leader

A message becomes an entry of the store in two steps, and is read in the opposite order:

    message  -- json_codec.py: by its fields and their types -->  JSON data  -- signed_json.py -->  entry

- The signature of an entry of the store is an HMAC-SHA256 of the JSON, the name of the job and the name of the entry. The
  key of the signature is the secret of the job, which is `Rendezvous(secret=...)` or the environment variable
  MPWATCH_SECRET. If a job has no secret, nothing is signed, and every program that can reach the store can write valid
  entries.
- Sizes are limited. An entry of the store may have at most 256 KiB, or 1 MiB if the entry is a message to all nodes. A text
  in a message may have at most 65,536 characters. The JSON of one rank's failure may have at most 64 KiB, so a larger
  failure is shortened before it is sent.
- The reader of an entry first checks the size and the signature, and then checks the type of each field. The reader refuses
  control characters in texts, because they could disturb a terminal that shows the text. The reader of the store logs and
  ignores invalid entries.
- The state of torch's rendezvous is the only pickle that nodes exchange. mpwatch reads the pickle of torch's rendezvous with
  a restricted unpickler, which creates objects of only a few classes (rendezvous/torch_state.py).

node_machine.py and leader.py decide which messages are sent.
"""
