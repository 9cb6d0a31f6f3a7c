"""Who started this process: a small file per environment, which answers the questions of launcher.py.

Reading the answers from the environment's variables needs no torch; nothing else in the package takes orders from them.
"""
