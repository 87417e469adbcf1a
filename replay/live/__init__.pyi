from .model import LiveModel as LiveModel
from .opening import attach as attach
from .opening import load_model as load_model
from .opening import open_live as open_live
from .server import Generation as Generation
from .server import application as application
from .shards import Shard as Shard
