"""Actor, critic, reference and reward model: each a model on a grid."""
