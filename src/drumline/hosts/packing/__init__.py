"""The rules that decide which files of a working folder are sent to the hosts.

`selection` decides for each file, with the help of `names` and `contents`, which recognise secrets,
and of `folders`, which recognises folders that are never sent. `listing` lists the files, and
`rules` has the values. `repack` applies the rules to archives of older versions.
"""
