"""A program with a live view: `python view_program.py FUNCTION NPROCS FIFO [ARGUMENT] [OPTION=VALUE ...]`."""

import ast
import sys

import mpwatch
from live_view import reporting_functions

function, nprocs, fifo, *more = sys.argv[1:]
options = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in more if "=" in word)}
args = [ast.literal_eval(word) for word in more if "=" not in word]
print("before")
result = mpwatch.run(getattr(reporting_functions, function), int(nprocs), args=(fifo, *args), grace_period=5, **options)
print("after", *result)
