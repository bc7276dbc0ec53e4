"""What is observed of slices and hosts, in terms that belong to no cloud and no kind of host.

`cloud` and `hosts` translate what they see into these values; the core of the job manager decides
by them and knows nothing else of either. These modules import nothing else of Drumline.
"""
