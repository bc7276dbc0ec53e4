"""The Cloud TPU API served on this machine, with hosts that accept logins and can be broken.

It is a process of its own (`python -m drumline.cloud.emulator --home DIR`), so it outlives its
callers, as a cloud does. Read it in this order:

- `drumline.cloud.model` has the behaviour of the cloud, without I/O: `resources` are its values,
  `fleet` changes them, `operations` are its long-running operations, `machines` its physical
  machines, and `errors` have Google's error messages.
- `host` is one host: a process that is the ancestor of all processes on it. `sshd` is its SSH
  server. `running_hosts` starts and ends hosts as the fleet orders, with `host_messages` between
  them. `processes` finds and kills processes. `machines` has the folders of the physical machines.
- `service` joins the fleet and the hosts and advances them in time. `breaking` breaks hosts and
  machines.
- `api` serves them: `rest` has the routes, `request_bodies` parses bodies, `responses` makes JSON.
  `control` has calls that a real cloud does not have: preempt, break, change the capacity. `login`
  checks the token of each call.
- `buckets` keeps the objects of Cloud Storage as files, with their `checksums`. `api.storage`,
  `api.uploads` and `api.storage_wire` serve them, in the emulator or alone.
- `config` has the settings. `launch` finds or starts the process.
"""
