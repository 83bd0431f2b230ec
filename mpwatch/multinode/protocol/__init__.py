"""The messages that the nodes of a job send to one another, and how they are encoded, signed and stored.

The messages (messages.py) go through the store of the round, always to or from the leader (store_channel.py):

    every node --- NodeInfo, AttemptFailing, RanksStalled, RanksStopped, AttemptReport ---------------> the leader
    every node --- StopRequest, StepsHeld, NodeLeaving, ShutdownAck ----------------------------------> the leader
    the leader --- StartAttempt, StopAttempt, HoldSteps, StopAtStep, AttemptDecision, JobFinished ----> all nodes
    the leader --- RankAssignment --------------------------------------------------------------------> one node
    every node --- heartbeat: a counter, which is neither encoded nor signed -------------------------> the leader
    the leader --- heartbeat -------------------------------------------------------------------------> all nodes

A message becomes an entry of the store in two steps. The receiver does these steps in the opposite order:

    message  -- json_codec.py: by its fields and their types -->  JSON data  -- signed_json.py -->  entry

- Entries are signed with the secret of the job: `Rendezvous(secret=...)` or the environment variable MPWATCH_SECRET. If a
  job has no secret, nothing is signed, and every program that can reach the store can write valid entries.
- An entry may have at most 256 KiB, or 1 MiB if the entry is a message to all nodes. A text in a message may have at most
  65,536 characters. If the JSON of a rank's failure is larger than 64 KiB, the sender shortens the failure.
- The reader of an entry checks first the size and the signature, and then the type of each field. StoreChannel logs and
  ignores invalid entries.
- The state of torch's rendezvous is the only pickle that nodes exchange. A restricted unpickler, which creates only objects
  of six classes, reads the state of torch's rendezvous (rendezvous/torch_state.py).

node_machine.py and leader.py decide which messages are sent.
"""
