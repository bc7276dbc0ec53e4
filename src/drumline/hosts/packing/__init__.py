"""The rules that decide which files of a working folder are sent to the hosts.

`selection` decides for each file and is the only place that does; `names` and `contents` recognise
secrets, `folders` recognises folders that are never sent, `rules` holds the values.
"""
