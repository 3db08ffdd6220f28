"""Measures, each defined once and used everywhere.

retrieval   how well blocks were chosen
budget      which budget gives a density
fidelity    how close two videos are: PSNR, SSIM, LPIPS
perceptual  the same by networks and models of vision that packages bring along: ST-LPIPS, VMAF, ColorVideoVDP
vbench      how good one video is: four dimensions of VBench
measures    every measure of videos by name
pairs       videos on disk, in pairs
"""
