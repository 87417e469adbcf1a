from .file import Timeline as Timeline
from .file import writing as writing
from .observer import TimelineObserver as TimelineObserver
from .observer import play as play
from .window import WHOLE as WHOLE
from .window import Window as Window
