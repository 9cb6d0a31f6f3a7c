"""The same tiny program under what others have for a lost rank; `recovery.py` starts each and kills a rank."""
