from .model import LiveModel as LiveModel
from .opening import attach as attach
from .opening import load_model as load_model
from .opening import open_live as open_live
from .requests import unused as unused
from .server import Server as Server
from .shards import Shard as Shard
