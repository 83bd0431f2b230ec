"""The live view shows the progress of the ranks, and runs in the caller's thread.

watcher thread --- statuses of the ranks ---> LiveView (live.py)
|  model.py: rates, overall progress -> Snapshot
v
Display.show(snapshot): one of
TerminalDisplay (terminal.py)       the last rows of a terminal (rich_rows.py)
NotebookDisplay (notebook.py)       an HTML table in the cell that runs
LineDisplay     (live.py)           lines on stderr
"""
