// Trains a (rewritten) TorchScript file with gotch for a few steps and saves it: but for the line of #cgo, nothing in here knows of tsmem.
//
//	train MODEL.pt TRAINED.pt
package main

import (
	"fmt"
	"log"
	"os"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/nn"
	"github.com/sugarme/gotch/ts"
)

// #cgo LDFLAGS: -Wl,--no-as-needed -L/path -ltsmem_ops -Wl,--as-needed -Wl,-rpath,/path
import "C"

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	vs := nn.NewVarStore(gotch.CPU)
	model, err := nn.TrainableCModuleLoad(vs.Root(), os.Args[1])
	check(err)
	model.SetTrain()
	optimizer, err := nn.DefaultSGDConfig().Build(vs, 1e-2)
	check(err)

	images := ts.MustOnes([]int64{4, 3, 64, 64}, gotch.Float, gotch.CPU)
	for step := 0; step < 3; step++ {
		output := model.ForwardT(images, true)
		loss := output.MustSquare(true).MustMean(gotch.Float, true)
		check(optimizer.BackwardStep(loss))
		fmt.Printf("step %d loss %.6f\n", step, loss.Float64Values(true)[0])
	}
	check(model.Save(os.Args[2]))
}
