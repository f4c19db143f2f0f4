# A grid of which one rank would own nothing.
# ranks: 3
# raises: ValueError
# says: {here}.*ValueError: Domain: .*\(2,\)

import mpiad

mpiad.Domain((2,))  # here
