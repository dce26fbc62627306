"""Functions of torch's optimizers."""

from torch.optim._muon import _adjust_lr as adjusted_lr
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize
from torch.optim.optimizer import _to_scalar as to_scalar
