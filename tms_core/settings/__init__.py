"""Settings out of four layers (flags, environment, file, defaults), each value with where it came from.

To debug a configuration one asks "where does this value come from", so every layer is read into the same flat form,
setting by setting with its origin, before anything is checked, and every error can name what to change. That is why
this is not left to a settings library: those merge first and forget. A mistyped setting is an error with a
suggestion and never a default in silence: a janitor that missed a ``protect`` would delete.
"""
