"""Faults that the suite must notice: small changes of the package, each with a test that fails then.

python -m tests.planted                    # plants all of them, one by one, in a copy of the tree
python -m tests.planted --only cache/      # those of some files
python -m tests.planted.draw --count 50    # draws others, and adds those that a test notices
"""
