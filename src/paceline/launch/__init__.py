"""Who started this process: one small file per environment, each answering the questions of launcher.py.

Reading the answers from the environment's variables needs no torch; nothing else in the package takes orders from them.
"""
