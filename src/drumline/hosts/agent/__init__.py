"""The agent: runs one attempt's program on one host and outlives every connection.

This package is zipped into one file, pushed to each host, and called as `python3 agent VERB …`. It
needs nothing but Python 3.8. All it knows stands in files below ~/.drumline, each replaced in one
rename, so any later call, from any connection, finds out what became of an attempt:

    jobs/<job>/<attempt>/  program.json  what to run             pid.json    the program's leader
                           started.json  claimed once, for good  exit.json   how it ended
                           log           set-up and program      stop.json   it must not run (on)
                           times         when the log grew
                           secrets.json  0600, gone once the program has them in its environment
                           heartbeat.json, error.json            written by the program itself
    steps/<key>.json       a set-up step that ran on this host
    code/<sha>.tar.gz      the code as it was sent               work/<job>/<sha>/  unpacked

Three processes belong to a running attempt: the program, in a session of its own, which writes
straight into the log; the one that waits for it; and, while somebody looks, `watch`. Either of the
last two may be killed without the program noticing.
"""
