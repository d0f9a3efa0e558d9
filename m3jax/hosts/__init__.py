"""Several processes as one run: how they find each other, agree, follow process 0, and end together (docs/scale.md)."""

from m3jax.hosts.agree import agree, fingerprint
from m3jax.hosts.follow import led
from m3jax.hosts.job import Job
from m3jax.hosts.run import is_first, on_hosts

__all__ = ["Job", "agree", "fingerprint", "is_first", "led", "on_hosts"]
