"""The Cloud TPU API served on this machine, with hosts one can log in to, preempt and break.

It is a process of its own (`python -m drumline.cloud.emulator --home DIR`), so that it outlives
whoever uses it, as a cloud does. Read it in this order:

- `model` holds the things there are, `state` decides what becomes of them, with `capacity` and
  `operations`. Pure; the clock comes in as an argument.
- `asked` reads what a caller sent, `wire` writes what it gets back, `errors` says what went wrong
  in Google's words.
- `host` is one host: a process that is the ancestor of all that runs there; `sshd` is its way in,
  `processes` how it finds and ends them.
- `hosts` starts and ends hosts as `state` orders; `service` joins the two and lets time pass.
- `rest` serves the API, with `call`, `filters` and `offers`; `control` what a cloud does not let
  its users do: preempt, break, run dry. `login` stands before both.
- `config` is what the cloud is like; `launch` finds or starts the process, with the standard
  library only.
"""
