"""An environment of verifiers 0.4 with a second agent, trained or not, over the taskset of two_turns."""

import verifiers.v1 as vf
from two_turns import InProcess, Question, TwoTurnsTask

__all__ = ["InProcess", "TwoAgents", "TwoAgentsEnv"]


class TwoAgentsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    other: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    trains_other: bool = False


class TwoAgents(vf.Taskset[TwoTurnsTask]):
    def load(self):
        for number in (0, 1, 3, 0):
            yield TwoTurnsTask(Question(prompt=f"{number}+{number}=", number=number), self.config.task)


class TwoAgentsEnv(vf.Env[TwoAgentsConfig]):
    async def setup(self, agents):
        agents.other.trainable = self.config.trains_other

    async def run(self, task, agents):
        await agents.agent.run(task)
        await agents.other.run(task)
