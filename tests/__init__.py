"""All tests. The tree is that of dynmo.

torch uses one thread, as a rank does. Test processes that each use all cores wait for each other.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
