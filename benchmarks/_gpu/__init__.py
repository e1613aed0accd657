"""The parts of ``gpu.py``, by what they measure; each is a function of the session that
returns figures.
"""
