"""Random numbers that belong to a sample: dropout, noise and choices inside a model, the same on every layout.

survey.py     a look at the program: which dimension of each random tensor counts samples
others.py     generators beside torch's: Python's, numpy's, and those that a model holds
shares.py     which sample, and which element of its slice, each element of a local tensor is
hashing.py    random words as a pure function of keys and places
operators.py  what torch's random operators return, made of those words
mode.py       stands in for torch's random operators during a micro-batch
"""
