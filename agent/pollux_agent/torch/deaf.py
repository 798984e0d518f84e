"""Imported first by the process that workers are forked from: it ends with the launcher, with nothing else.

A signal to stop is the workers' to hear. Where all processes of a group are signalled, this one would take
them along before they have made their checkpoint.
"""

import os
import signal

from pollux_agent.lifeline import die_with_parent

signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent(os.getppid())
