"""The model of a step: what was measured once, and how long a step takes with an algorithm on a network."""

from bagua.advise.advice import DDP as DDP
from bagua.advise.advice import Advice, advise
from bagua.advise.advice import rehearse_all as rehearse_all
from bagua.advise.advice import weigh as weigh
from bagua.advise.facts import CallFacts, MachineFacts, ModelFacts, ParameterFacts
from bagua.advise.measure import LEAST_STEPS as LEAST_STEPS
from bagua.advise.measure import StepMeter as StepMeter
from bagua.advise.measure import measure_model
from bagua.advise.network import Cluster, Cost, cost_of
from bagua.advise.others import ALONE as ALONE
from bagua.advise.others import Others as Others
from bagua.advise.prediction import Prediction, extrapolate, outside_calibration, predict
from bagua.advise.probe import call_facts as call_facts
from bagua.advise.probe import link_facts as link_facts
from bagua.advise.probe import machine_facts as machine_facts
from bagua.advise.probe import probe_machine
from bagua.advise.rehearse import rehearse
from bagua.advise.simulation import max_min_shares, step_seconds
from bagua.advise.trace import Message, Moment, Rehearsal, Run

__all__ = [
    "Advice",
    "CallFacts",
    "Cluster",
    "Cost",
    "MachineFacts",
    "Message",
    "ModelFacts",
    "Moment",
    "ParameterFacts",
    "Prediction",
    "Rehearsal",
    "Run",
    "advise",
    "cost_of",
    "extrapolate",
    "max_min_shares",
    "measure_model",
    "outside_calibration",
    "predict",
    "probe_machine",
    "rehearse",
    "step_seconds",
]
