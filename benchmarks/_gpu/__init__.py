"""The parts of ``gpu.py``, by what they measure.

Each is a function of the session that returns figures.
"""
