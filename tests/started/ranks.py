"""What the server of ranks imports (distributed.py): all of ours."""

from started.whole import import_rooms

import_rooms("paceline")
