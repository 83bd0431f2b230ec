"""What nodes say to one another in the store of a round (board.py): as data, sealed, bounded, and checked on arrival.

Decides nothing: that is for the machines (member.py, chair.py).
"""
