// Trains a (rewritten) TorchScript file with tch for a few steps and saves it: nothing in here knows of tsmem.
//   train MODEL.pt TRAINED.pt
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Reduction, TchError, Tensor, TrainableCModule};

fn main() -> Result<(), TchError> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = TrainableCModule::load(&files[0], vs.root())?;
    model.set_train();
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-2)?;

    let images = Tensor::ones([4, 3, 64, 64], (Kind::Float, Device::Cpu));
    for step in 0..3 {
        let output = model.forward_ts(&[&images])?;
        let loss = output.mse_loss(&output.zeros_like(), Reduction::Mean);
        optimizer.backward_step(&loss);
        println!("step {step} loss {:.6}", loss.double_value(&[]));
    }
    model.save(&files[1])
}
