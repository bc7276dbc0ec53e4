"""Drumline trains JAX models on TPUs that can be taken away at any minute.

`drumline.heartbeat(step=120, loss=0.41)` tells the job manager where a program is. All else is in
the rooms below, and each is imported by whoever needs it.
"""

from drumline.heartbeat import heartbeat

__all__ = ["__version__", "heartbeat"]

__version__ = "0.1.0"
