"""The messages between nodes: their types, their JSON, their signatures, and the store that carries them (board.py).

member.py and chair.py decide what is sent.
"""
