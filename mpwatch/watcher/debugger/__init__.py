"""The prompt of pdb in the caller's terminal or notebook, for ranks at a breakpoint.

This package runs in the caller's thread.
"""
