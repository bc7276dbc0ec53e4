"""The Cloud TPU API served on this machine, with hosts one can log in to, preempt and break.

It is a process of its own (`python -m drumline.cloud.emulator --home DIR`), so that it outlives
whoever uses it, as a cloud does. Read it in this order:

- `drumline.cloud.model` is how the cloud behaves: `resources` are the things there are, `fleet`
  decides what becomes of them, with `capacity` and `operations`, and `errors` says what went wrong
  in Google's words. Pure; the clock comes in as an argument.
- In `hosts`, `host` is one host: a process that is the ancestor of all that runs there; `sshd` is
  its way in; `running` starts and ends them as the fleet orders. `processes` finds and ends what
  they started.
- `service` joins the two and lets time pass.
- `api` serves it: `rest` with `call`, `filters` and `offers`; `asked` is what a caller sent, `wire`
  what it gets back; `control` is what a cloud does not let its users do: preempt, break, run
  dry. `login` stands before both.
- `config` is what the cloud is like; `launch` finds or starts the process, with the standard
  library only.
"""
