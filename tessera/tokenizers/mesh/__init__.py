"""Mesh tokenizers: quantised triangles <-> ids.

MeshGPT's (Siddiqui et al. 2023): `graph` what is computed of a mesh, `autoencoder` the network, `graph_losses` its turn,
`graph_stage` what the engine trains.
"""
