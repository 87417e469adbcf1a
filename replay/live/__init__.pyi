from .model import LiveModel as LiveModel
from .opening import open_live as open_live
from .requests import unused as unused
from .server import Server as Server
from .shards import Shard as Shard
