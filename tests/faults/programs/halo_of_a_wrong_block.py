# The halo of an array that isn't this rank's block.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: .*\(3, 3\)

import numpy as np

import mpiad

domain = mpiad.Domain((8, 8))
domain.exchange(np.ones((3, 3)))  # here
