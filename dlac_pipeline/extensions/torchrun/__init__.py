"""torchrun with the rendezvous of DLAC."""
