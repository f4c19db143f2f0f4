# A grid of which one rank would own nothing.
# raises: ValueError
# says: {here}.*ValueError: Domain: .*\(1,\)
# together: yes

import mpiad

mpiad.Domain((1,))  # here
