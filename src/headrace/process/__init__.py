"""The engine core in a process of its own: how it is started, what is said to it, how its end is noticed."""
