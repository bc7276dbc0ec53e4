"""The Cloud TPU API served on this machine, with hosts that can be logged in to and broken.

It is a process of its own (`python -m drumline.cloud.emulator --home DIR`), so that it outlives
its callers, as a cloud does. Read it in this order:

- `drumline.cloud.model` is how the cloud behaves: `resources` are its values, `fleet` decides how
  they change, with `capacity`, `operations` and the physical `machines` that hosts are on, and
  `errors` are Google's error messages. Pure; the clock is an argument.
- In `hosts`, `host` is one host: a process that is the ancestor of all that runs there; `sshd` is
  its SSH server, `devices` its chips; `running` starts and ends hosts as the fleet orders.
  `processes` finds and ends what they started. `machines` has what stays when a host goes.
- `service` joins the two and advances them in time; `breaking` breaks hosts and machines.
- `api` serves it: `rest` with `call`, `filters` and `offers`; `asked` is what a caller sent, `wire`
  what it gets back; `control` does what users of a real cloud cannot: preempt, break, use up
  capacity. `login` checks the token of every call.
- `buckets` keeps the objects of Cloud Storage as files, with their `checksums`; `api.storage`,
  `api.uploads` and `api.storage_wire` serve them, in the emulator or alone.
- `config` has the settings; `launch` finds or starts the process, with the standard library only.
"""
