"""The agent: runs the program of one attempt on one host and survives every disconnection.

This package is zipped into one file, copied to each host, and called as `python3 agent VERB …`. It
needs only Python 3.8. Its whole state is in files below ~/.drumline, each replaced by a rename, so
a later call over any connection can report the state of an attempt:

    jobs/<job>/<attempt>/  program.json  the program to run      pid.json    the leading process
                           started.json  written once, at start  exit.json   the exit of the program
                           log           output of set-up, run   stop.json   never run (again)
                           times         when the log grew
                           secrets.json  mode 0600, deleted once the program has started
                           heartbeat.json, error.json            written by the program itself
    steps/<key>.json       the result of a set-up step on this host
    code/<sha>.tar.gz      an archive of code                    work/<job>/<sha>/  unpacked
    code/<sha>.gz          a large file of code

A running attempt has three processes: the program, in its own session, which writes directly to
the log; a waiter, which records the exit; and, while a server is connected, `watch`. The program
is not affected if one of the other two is killed.
"""
