"""Settings from four layers (flags, environment, file, defaults), each value with its origin.

Operators ask where a value comes from. Therefore every layer is read into the same flat form, setting by setting with
its origin, before anything is checked, and every error can name the setting to change. Settings libraries merge first
and lose the origins. A mistyped setting is an error with a suggestion, never a silent default: a janitor that missed a
``protect`` would delete rows.
"""

from __future__ import annotations

#: The environment variable that names the settings file of both programs.
CONFIG_ENV = "TMS_CONFIG"
