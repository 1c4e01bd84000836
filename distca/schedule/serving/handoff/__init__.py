"""The hand-off of a prompt's keys and values from the ranks that prefill to an engine that decodes.

`protocol.py` has what holds, the values and the messages; `sender.py` and `receiver.py` are its two
sides, and what an abort during it does. Prefill ranks, vLLM's connector and the simulator run them.
"""

from distca.schedule.serving.handoff.receiver import Receiver, receive
from distca.schedule.serving.handoff.sender import Sender, send

__all__ = ["Receiver", "Sender", "receive", "send"]
