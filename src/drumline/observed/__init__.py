"""What can be seen of the world, in words that belong to no cloud and to no kind of host.

`cloud` and `hosts` translate what they see into these values; the core of the job manager decides
by them and knows nothing else of either. They import nothing of ours.
"""
