from .stride import Predictor as Predictor
from .stride_training import Tokens as Tokens
from .stride_training import Training as Training
from .stride_training import recall as recall
from .stride_training import recall_of_previous as recall_of_previous
from .stride_training import train as train
